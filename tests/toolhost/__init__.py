"""The C++ toolhost, tested from outside: as a process, by its bytes."""
