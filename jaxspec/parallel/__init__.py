"""How a model is spread over devices.

axes    logical axes: the names of an array's dimensions, and the sizes that a config gives them
mesh    the devices of one engine
layout  the pieces of one model's arrays: which device holds which
group   the devices as a program sees them, and the sum over them
"""
