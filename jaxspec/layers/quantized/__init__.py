"""Quantised linear modules in parameter tables.

files     the tensors of a module in each format, and the codes and scales that they hold
rounding  floats -> codes and scales
table     a table of plain weights -> that of a quantised checkpoint
"""

from jaxspec.layers.quantized.table import stored

__all__ = ["stored"]
