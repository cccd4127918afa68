"""Several processes that are one trainer: rank 0 is the pool's process, the others do as it says."""
