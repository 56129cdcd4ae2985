"""The C module (native/wire.h) as Python sees it. `ffi` is cffi's; the functions are those of the header."""

from typing import Any

class _Lib:
    TB_NONE: int
    TB_LINE: int
    TB_OVERSIZE: int
    TB_PLAIN: int
    TB_CALL: int
    TB_BAD: int
    TB_CLOSE: int
    TB_OK: int
    TB_INVALID_JSON: int
    TB_NOT_AN_OBJECT: int
    TB_TOO_DEEP: int
    TB_TOO_LONG: int
    TB_TWICE: int
    TB_WRONG_TYPE: int
    TB_BOTH_INPUTS: int
    TB_NO_AID: int
    TB_NUL_NAME: int
    TB_ID: int
    TB_AID: int
    TB_INPUT_JSON: int
    TB_INPUTS: int
    TB_DS_STATE: int
    TB_IDEMPOTENCY_KEY: int
    TB_LEASE_TOKEN: int
    TB_TIMEOUT_MS: int
    TB_SESSION: int
    TB_STREAM: int
    TB_TRACEPARENT: int
    TB_RUN_ID: int
    TB_REQUEST_ID: int
    TB_MEMBERS: int
    TB_I_KIND: int
    TB_I_COUNT: int
    TB_I_TOOL: int
    TB_I_PROBLEM: int
    TB_I_MEMBER: int
    TB_I_OUT: int
    TB_I_OUT_LEN: int
    TB_I_IDS: int
    TB_I_IDS_LEN: int
    TB_I_SPANS: int
    TB_ITEM: int
    TB_REPLY_OK: int
    TB_REPLY_JUNK: int
    TB_REPLY_OVERSIZE: int
    TB_REPLY_STRANGER: int

    def tb_framer_new(self, cap: int) -> Any: ...
    def tb_framer_free(self, f: Any) -> None: ...
    def tb_framer_feed(self, f: Any, data: bytes, len: int) -> int: ...
    def tb_framer_read(self, f: Any, fd: int) -> int: ...
    def tb_framer_next(self, f: Any, line: Any) -> int: ...
    def tb_framer_end(self, f: Any) -> None: ...
    def tb_framer_drop(self, f: Any) -> None: ...
    def tb_framer_pending(self, f: Any) -> int: ...
    def tb_tools_new(self) -> Any: ...
    def tb_tools_free(self, t: Any) -> None: ...
    def tb_tools_put(self, t: Any, name: bytes, len: int, index: int) -> int: ...
    def tb_tools_open(self, t: Any, index: int, open: int) -> None: ...
    def tb_tools_find(self, t: Any, name: bytes, len: int) -> int: ...
    def tb_batch_new(self) -> Any: ...
    def tb_batch_free(self, b: Any) -> None: ...
    def tb_scan(self, f: Any, tools: Any, b: Any, max_lines: int, max_depth: int, view: Any) -> int: ...
    def tb_skip_lines(self, data: bytes, len: int, n: int) -> int: ...
    def tb_take(
        self,
        f: Any,
        b: Any,
        max_lines: int,
        fence: bytes,
        fence_len: int,
        ids: Any,
        ids_len: int,
        max_depth: int,
        taken: Any,
    ) -> int: ...
    def tb_spawn(self, child: Any, step: Any) -> int: ...
    def tb_adopt_orphans(self) -> int: ...

class _FFI:
    NULL: Any
    def new(self, cdecl: str, init: Any = ...) -> Any: ...
    def gc(self, cdata: Any, destructor: Any, size: int = ...) -> Any: ...
    def release(self, cdata: Any) -> None: ...
    def buffer(self, cdata: Any, size: int = ...) -> Any: ...
    def unpack(self, cdata: Any, length: int) -> Any: ...
    def string(self, cdata: Any, maxlen: int = ...) -> bytes: ...
    def from_buffer(self, buf: Any) -> Any: ...
    def cast(self, cdecl: str, value: Any) -> Any: ...

lib: _Lib
ffi: _FFI
