"""How arrays are spread over devices.

mesh  the devices of one engine, and the rules that place an array on them
"""
