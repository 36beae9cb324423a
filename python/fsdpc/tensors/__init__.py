"""Tensor creation, autograd mode, and the devices that hold tensors."""
