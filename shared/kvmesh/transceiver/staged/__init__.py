"""The runtime CPP: pages travel through staging buffers, in pieces, over any channel that moves contiguous bytes."""
