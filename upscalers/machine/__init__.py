"""Resources of the machine: processors and free memory."""
