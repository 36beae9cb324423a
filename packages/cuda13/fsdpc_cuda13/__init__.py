"""The plugin for GPUs, libfsdpc_cuda.so, which fsdpc of the same version finds here."""
