"""What is special about the batches of a step: sizes that grow from step to step, and replicas that have no samples."""
