import warnings

# It warns of optional packages that it does not find, and of sequence parallelism where experts have none: both meant.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings(
    "ignore", message=r"`torch.distributed.reduce_scatter_tensor` is deprecated", category=FutureWarning
)
