"""The version of the client, the service and the kernels: one distribution."""

__version__ = "0.1.0"
