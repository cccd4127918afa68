"""The Megatron backend: large dense and mixture-of-experts models over tensor, pipeline, expert and data ranks."""
