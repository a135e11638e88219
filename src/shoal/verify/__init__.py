"""The proof: any plan against one process, tensor by tensor, and the planted bugs that show that the proof can fail."""
