"""What is read of run directories: files that grow, columns of steps, curves at every zoom, and a cache of them."""
