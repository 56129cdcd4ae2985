# So that `ctest` finds the tests from here as well, not only with `--test-dir build`.
subdirs(build)
