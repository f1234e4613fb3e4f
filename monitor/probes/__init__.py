"""Facts beside the metrics: GPUs and processes of a node, Ray, checkpoints. Each probe may fail or hang by itself."""
