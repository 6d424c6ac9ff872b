"""Figures from finished run directories: `fedjax-sim report DIR [DIR …]`."""
