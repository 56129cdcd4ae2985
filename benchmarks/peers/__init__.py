"""Who else runs tools for a caller: one file each, all with the same task, and ours beside them.

The task is to echo an object, `{"n": …, "text": "hello"}`. What each call brings back is compared with what it asked.
"""
