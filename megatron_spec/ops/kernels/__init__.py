"""All Triton kernels. Import this package only where a fast path of `planning.paths` allows it."""
