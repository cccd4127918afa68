"""Step control: a step's length is chosen by how far it is predicted to move the policy."""
