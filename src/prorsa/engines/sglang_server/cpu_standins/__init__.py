"""This directory stands first on the import path of CPU engines, and of nothing else.

Its packages take the place of three which SGLang imports at start: kernels for GPUs, a compiler of such kernels, and image
operations. No GPU code runs on a CPU, and Prorsa's engines serve text.
"""
