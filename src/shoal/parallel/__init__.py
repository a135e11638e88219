"""Techniques that lay a model over ranks: each is a function that changes a plain module, and each equals one process."""
