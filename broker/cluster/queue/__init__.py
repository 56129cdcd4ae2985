"""Durable calls: kept by NATS until a broker of the cluster has run them."""
