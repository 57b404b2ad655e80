"""`--kernel triton`: attention, storing and what surrounds products as Triton kernels. docs/kernels.md describes them.

Nothing here imports triton before the backend is asked to serve a device that it can serve: it may be missing, and it
takes a while.
"""
