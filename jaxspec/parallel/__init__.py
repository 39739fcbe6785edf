"""How a model is spread over devices.

axes    logical axes: the names of an array's dimensions, and the sizes that a config gives them
mesh    the devices of one engine
layout  Layout: which piece of one model's arrays a device holds; Placement: an engine's models
gpus    the GPUs that the driver names, whether JAX uses them or not
group   the devices as a program sees them, and the sum over them
processes  several processes of one engine: what the leader tells, and whether all still live
"""
