"""What `broker bench` measures with; nothing here is imported before it is asked for."""
