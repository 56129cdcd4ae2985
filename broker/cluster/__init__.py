"""What brokers that share a NATS server share."""
