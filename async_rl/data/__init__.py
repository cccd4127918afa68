"""Training data from files and hubs: its sources, the order in which they are asked, and the task made of both."""
