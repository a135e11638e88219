"""Codecs that make gradients and weights smaller before they cross between processes: values and pure functions, no
collectives."""
