"""Triton kernels, one file per concern: functions on tensors. The plain PyTorch reference is named in each file.

Nothing here is imported unless it is used, so a machine without Triton runs everything on the references.
Tests run them against it, in Triton's interpreter where there is no GPU.
"""
