"""Mooncake's transfer engine as a data plane: one-sided writes over RDMA or TCP."""
