"""The hierarchical cache: pages that leave the device for host memory and storage, and come back in time."""
