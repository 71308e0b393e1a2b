"""Rows in etcd: several registries over one etcd are one registry, on etcd's own leases, transactions and watches."""

from kvgrpc.registry.store.etcd.store import EtcdStore

__all__ = ["EtcdStore"]
