"""Triton kernels, one file per concern: pure functions on tensors. Each file holds its plain PyTorch reference.

Nothing here is imported unless it is used, so a machine without Triton runs everything on the references.
Tests run every kernel against its reference, in Triton's interpreter where there is no GPU.
"""
