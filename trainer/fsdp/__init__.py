"""The torch backend over several ranks: torch's FSDP2, each rank with a part of the weights and of every batch."""
