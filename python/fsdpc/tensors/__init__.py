"""Tensors made from nothing, the mode of autograd, and the devices that tensors live on."""
