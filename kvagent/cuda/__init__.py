"""GPU memory: what CUDA is asked for (`calls`), and what an agent does with a GPU (`device`).

Nothing here touches CUDA when it is imported: a sidecar of host memory never does.
"""
