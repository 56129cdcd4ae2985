"""`broker serve`: the daemon, in the foreground."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from broker import addresses, config, toolhosts, where
from broker.cli.common import fail, subcommand
from broker.config import Loaded
from broker.errors import ConfigError
from broker.settings import Config

if TYPE_CHECKING:
    from broker.server import Broker

SECRETS = {("nats", "url"), ("utp", "dsn")}  # may have a password in them
EPILOG = """\
examples:
  broker serve                                  the demo tools, on the default socket
  broker serve --plugin ./my_tools.so           your plugin, in our toolhost
  broker serve --http 127.0.0.1:8080            over HTTP, too, with a page that shows what happens
  broker serve --config broker.toml --check     is this configuration right?

A flag wins over BROKER_<SECTION>_<KEY>, that over MACHINA_*, that over the file, that over the default.
SIGTERM drains and exits 0; SIGHUP (or `broker reload`) reads broker.toml again.
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "serve",
        "run the broker in the foreground",
        "Runs the broker in the foreground until SIGTERM or Ctrl-C.",
        EPILOG,
    )
    parser.add_argument("--socket", metavar="PATH", help="Unix socket for callers; the operator's is PATH.operator")
    parser.add_argument("--tcp", metavar="HOST:PORT", help="listen on TCP as well")
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="serve HTTP: the tools, metrics, and a page that shows both"
    )
    parser.add_argument("--nats", metavar="URL", help="join the brokers and callers on this NATS server")
    parser.add_argument("--cluster", metavar="NAME", help="with --nats: whom to join (default: default)")
    parser.add_argument(
        "--remote", action="store_true", default=None, help="with --nats: tools that only other brokers have, too"
    )
    parser.add_argument("--insecure", action="store_true", default=None, help="allow --tcp, --http beyond loopback")
    parser.add_argument("--plugin", metavar="PATH", action="append", help="a plugin to serve; may be repeated")
    parser.add_argument("--toolhost", metavar="BIN", help="the executable that runs the plugins (default: ours)")
    parser.add_argument("--config", metavar="FILE", help="broker.toml (default: ./broker.toml, then ~/.config)")
    parser.add_argument("--check", action="store_true", help="validate and explain the configuration, start nothing")
    parser.add_argument("--log", metavar="LEVEL", choices=["debug", "info", "warning", "error"], default="info")
    parser.set_defaults(run=run)


def load(arguments: argparse.Namespace) -> Loaded:
    """The file, the environment and the flags; the demo tools where nobody asked for any."""
    flags = {
        ("server", "socket"): arguments.socket,
        ("server", "tcp"): arguments.tcp,
        ("server", "insecure"): arguments.insecure,
        ("http", "listen"): arguments.http,
        ("nats", "url"): arguments.nats,
        ("nats", "cluster"): arguments.cluster,
        ("nats", "remote"): arguments.remote,
    }
    loaded = config.load(arguments.config, flags, os.environ)
    toolhosts.add(loaded, arguments.plugin or [], arguments.toolhost, os.environ)
    return loaded


def run(arguments: argparse.Namespace) -> int:
    try:
        loaded = load(arguments)
        if arguments.check:
            return check(loaded)
        return _serve(arguments, loaded)
    except ConfigError as error:
        return fail(error, 2)


def _serve(arguments: argparse.Namespace, loaded: Loaded) -> int:
    import uvloop

    from broker import server
    from broker.observe.log import Log

    settings = loaded.config
    socket = settings.server.socket or addresses.default_socket(os.environ)

    def ready(broker: Broker, places: list[str]) -> None:
        processes = sum(len(pool.ready) for pool in broker.equipment.pools())
        print(f"broker ready {' '.join(places)} tools={len(broker.registry)} toolhosts={processes}", flush=True)
        if sys.stdout.isatty() or "toolhost.demo" in loaded.origins:
            page = next((place for place in places if place.startswith("http://")), "")
            _say_what_to_try(socket, arguments.socket is not None, page)

    def reload_config() -> Config:
        return load(arguments).config

    uvloop.run(server.serve(settings, socket, Log(level=arguments.log), ready, reload_config))
    return 0


def _say_what_to_try(socket: str, named: bool, page: str) -> None:
    command = sys.argv[0] if os.sep in sys.argv[0] else "broker"
    command = os.path.relpath(command) if os.sep in command and command.startswith(os.getcwd()) else command
    flag = f" --socket {socket}" if named else ""
    browse = f"\nor in a browser: {page}\n" if page else ""
    print(
        f"""
try, in another terminal:
  {command} tools{flag}
  {command} call{flag} AID.DEMO.ECHO.v1 '{{"hello":"world"}}'
  {command} status{flag}
{browse}Ctrl-C stops the broker and everything it started.
""",
        flush=True,
    )


def check(loaded: Loaded) -> int:
    """Validates, and says what each setting is and where it came from."""
    from broker.bus import without_secrets
    from broker.runtimes.python.program import interpreter

    settings = loaded.config
    print(f"configuration: {loaded.file or 'no file, defaults only'}")
    for section in config.TABLES:
        values = getattr(settings, section)
        print(f"[{section}]")
        for key in values.__struct_fields__:
            value = getattr(values, key)
            if (section, key) == ("server", "socket") and not value:
                value = addresses.default_socket(os.environ)
            if (section, key) in SECRETS:
                value = without_secrets(value)
            origin = loaded.origins.get(f"{section}.{key}", "default")
            print(f"  {key} = {value!r}  ({origin})")
    for host in settings.toolhost:
        print(f"[[toolhost]] {host.name}")
        print(f"  binary = {host.binary or where.toolhost()}")
        for plugin in host.plugins or ["none: the binary's own tools"]:
            print(f"  plugin = {plugin}")
        print(f"  {host.min} to {host.max} processes a plugin, isolate = {host.isolate}")
    for events in settings.events:
        print(f"[[events]] {events.name}")
        print(f"  command = {' '.join(events.command)}, {events.timeout_seconds:g} s, input = {events.input}")
    for app in settings.python:
        print(f"[[python]] {app.app_root}")
        print(f"  python = {interpreter(app)}")
        for one in app.tools:
            print(f"  {one.name} = {one.entry}, {one.timeout_seconds or app.timeout_seconds:g} s")
    tools = _learn(settings)
    for name, target in settings.utp.served().items():
        print(f"[utp.targets] {name} = {target.tool}{'' if target.tool in tools else '  (there is no such tool here)'}")
    print(f"{len(tools)} tools:")
    for name, source in sorted(tools.items()):
        print(f"  {name}  ({source})")
    print("the configuration is right")
    return 0


def _learn(settings: Config) -> dict[str, str]:
    """Asks every toolhost, as a start would; nothing stays. The tools, with where they come from."""
    import tempfile
    from pathlib import Path

    from broker.observe.log import Log
    from broker.runtimes.program import programs

    found = {one.name: " ".join(one.command) for one in settings.oneshot}
    found |= {one.name: " ".join(one.command) for one in settings.events}
    found |= {tool.name: app.app_root for app in settings.python for tool in app.tools}
    with tempfile.TemporaryDirectory(prefix="toolhost-broker-check-") as private:
        for program in programs(settings, Path(private)):
            for tool in program.learn(Log())[1]:
                if tool.aid in found:
                    raise ConfigError(
                        f"two tools are called {tool.aid}: {found[tool.aid]} and {program.source} have it"
                    )
                found[tool.aid] = program.source
    return found
