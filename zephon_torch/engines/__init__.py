"""Who runs the pipeline: the loop's thread, background threads, or worker processes."""
