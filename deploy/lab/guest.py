"""Common code of the lab's guests: a Debian kernel and initramfs under QEMU, and commands over
virtio-serial ports, separate from the guest's console, so that kernel messages never mix with their
output. Used by linux-siw/guest and pci/guest; linux-siw/README.md has the protocol.
"""

import argparse
import base64
import os
import platform
import queue
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

LAB = os.path.dirname(os.path.abspath(__file__))
# Makes the kernel and the root file system of every guest.
BUILD = os.path.join(LAB, "linux-siw", "build")
# Commands that can run at the same time; one more port is kept free to kill them.
CHANNELS = 8
BOOT_ATTEMPTS = 3
EXIT_TIMEOUT = 124  # as timeout(1)
EXIT_BROKEN = 125  # the guest or the channel failed, not the command


def built(suite, name):
    """A file that linux-siw/build has made of a Debian suite, by default of this machine's."""
    own = platform.freedesktop_os_release().get("VERSION_CODENAME")
    folder = "out" if suite in (None, "", own) else f"out-{suite}"
    return os.path.join(LAB, "linux-siw", folder, name)


class GuestError(Exception):
    """The guest did not start, or it died; the text gives the remedy."""


class Cancelled(Exception):
    """The command's caller disconnected, or its time limit is over."""


def fail(message):
    print(f"guest: error: {message}", file=sys.stderr)
    sys.exit(EXIT_BROKEN)


# ---- one control channel ----------------------------------------------------


class Channel:
    """One virtio-serial port; overlay/usr/sbin/control-channel is its other end."""

    def __init__(self, sock):
        self.sock = sock

    def expect(self, line, deadline):
        buffer = b""
        while not buffer.endswith(line):
            if not select.select([self.sock], [], [], max(0, deadline - time.monotonic()))[0]:
                raise Cancelled()
            data = self.sock.recv(4096)
            if not data:
                raise GuestError("the guest stopped while it booted")
            buffer += data

    def run(self, command, output, stop=None, deadline=None, kill=None):
        """Runs one shell command; output(b"out" or b"err", bytes) receives its
        standard output as it arrives, and its standard error at the end. End of
        file on the socket `stop`, or the time `deadline`, ends the command
        through kill(nonce). Returns the command's exit status."""
        nonce = secrets.token_hex(16)
        marker = f"\n{nonce} exit ".encode()
        self._send(f"{nonce} {base64.b64encode(command).decode()}\n".encode())
        buffer = b""
        cancelled = False
        while True:
            at = buffer.find(marker)
            trailer = None
            if at >= 0:
                line, newline, errors = buffer[at + len(marker) :].partition(b"\n")
                if newline:
                    trailer = [int(word) for word in line.split()]
                keep = len(buffer) - at
            else:
                # Pass on everything that cannot be the beginning of the marker.
                keep = next(
                    (n for n in range(min(len(marker), len(buffer)), 0, -1)
                     if buffer.endswith(marker[:n])), 0)
            ready, buffer = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
            finished = trailer and len(errors) >= trailer[1]
            try:
                if ready:
                    output(b"out", ready)
                if finished and errors:
                    output(b"err", errors)
            except OSError:
                # The reader has closed its end.
                if not cancelled and not finished:
                    kill(nonce)
                cancelled = True
            if finished:
                if cancelled:
                    raise Cancelled()
                return trailer[0]

            watched = [self.sock] + ([stop] if stop and not cancelled else [])
            left = None if deadline is None or cancelled else max(0, deadline - time.monotonic())
            readable = select.select(watched, [], [], left)[0]
            if not cancelled and (not readable or (stop in readable and not stop.recv(4096))):
                cancelled = True
                kill(nonce)
            if self.sock in readable:
                data = self.sock.recv(65536)
                if not data:
                    raise GuestError("the guest stopped while the command ran")
                buffer += data

    def _send(self, data):
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise GuestError("the guest is gone") from error


# ---- the guest ----------------------------------------------------------------


class Guest:
    """A guest. `machine` is the part of QEMU's command line specific to its kind, `setup` the shell
    command that brings up its devices, `initramfs` its root file system, `suite` the Debian suite of its
    kernel."""

    def __init__(self, options, machine, setup, initramfs=None, append=(), suite=None):
        self.options = options
        self.machine = machine
        self.setup = setup
        self.kernel = built(suite, "vmlinux")
        self.initramfs = initramfs or built(suite, "initramfs.cpio")
        self.append = list(append)
        self.folder = tempfile.mkdtemp(prefix="lab-guest-")
        self.log = options.log or os.path.join(self.folder, "console.log")
        self.qemu = None
        self.stopping = False
        self.idle = queue.Queue()
        self.kill_lock = threading.Lock()

    def add_files(self, archive):
        """Adds the files of another cpio archive: the kernel unpacks consecutive archives."""
        joined = os.path.join(self.folder, "initramfs.cpio")
        with open(joined, "wb") as output:
            for part in (self.initramfs, archive):
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, output)
        self.initramfs = joined

    def start(self):
        options = self.options
        append = ["console=ttyS0", "quiet", "panic=-1", "oops=panic", "mitigations=off",
                  "nokaslr", "no_timer_check", f"lab.channels={CHANNELS + 1}"] + self.append
        if options.interactive:
            append.append("lab.shell=1")
        command = [
            # QEMU dies with this script, however the script ends.
            "setpriv", "--pdeathsig", "KILL",
            "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none",
            # KVM hangs on some nested hosts; the emulator behaves the same everywhere.
            "-accel", "tcg", "-cpu", "max", "-no-reboot",
            "-m", str(options.memory), "-smp", str(options.cpus),
            "-kernel", self.kernel, "-initrd", self.initramfs, "-append", " ".join(append),
        ] + self.machine + ["-device", "virtio-serial-pci"]
        if options.pid_file:
            command += ["-pidfile", options.pid_file]
        if options.interactive:
            command += ["-chardev", "stdio,id=console,mux=on,signal=off",
                        "-mon", "chardev=console"]
        else:
            command += ["-chardev", f"file,id=console,path={self.log}"]
        command += ["-serial", "chardev:console"]
        deadline = time.monotonic() + options.boot_timeout
        # The emulator sometimes hangs before the kernel has started its second CPU: try again.
        for attempt in range(BOOT_ATTEMPTS):
            patience = (deadline - time.monotonic()) / (BOOT_ATTEMPTS - attempt)
            ours = self.boot(command)
            try:
                for channel in ours:
                    channel.expect(b"up\n", time.monotonic() + patience)
                break
            except Cancelled as error:
                self.qemu.kill()
                self.qemu.wait()
                if attempt + 1 == BOOT_ATTEMPTS:
                    raise GuestError(f"the guest did not boot in {options.boot_timeout} s") from error
                print("guest: it stands still; booting again", file=sys.stderr)
        self.killer = ours.pop()
        for channel in ours:
            self.idle.put(channel)

        text = bytearray()
        try:
            status = self.run(self.setup.encode(), lambda _, data: text.extend(data),
                              deadline=deadline)
        except Cancelled as error:
            raise GuestError(f"`{self.setup}` took too long") from error
        if status:
            raise GuestError(f"`{self.setup}` failed:\n{text.decode(errors='replace')}")

    def boot(self, command):
        """Starts QEMU; returns the host's ends of the control channels."""
        command = list(command)
        ours, theirs = [], []
        for number in range(CHANNELS + 1):
            left, right = socket.socketpair()
            ours.append(Channel(left))
            theirs.append(right)
            command += ["-chardev", f"socket,id=control{number},fd={right.fileno()}",
                        "-device", f"virtserialport,chardev=control{number},name=control{number}"]
        try:
            self.qemu = subprocess.Popen(
                command, stdin=None if self.options.interactive else subprocess.DEVNULL,
                pass_fds=[s.fileno() for s in theirs],
                start_new_session=not self.options.interactive)
        except FileNotFoundError as error:
            raise GuestError(f"{error.filename} is missing; run {BUILD}") from error
        for right in theirs:
            right.close()
        return ours

    def run(self, command, output, stop=None, deadline=None):
        channel = self.idle.get()
        try:
            return channel.run(command, output, stop, deadline, self.kill)
        finally:
            # A failed channel belongs to a dead guest and fails again.
            self.idle.put(channel)

    def kill(self, nonce):
        with self.kill_lock:
            self.killer.run(f"control-kill {nonce}".encode(), lambda *_: None)

    def stop(self):
        self.stopping = True
        if self.qemu:
            self.qemu.kill()
            self.qemu.wait()
            if self.options.pid_file and os.path.exists(self.options.pid_file):
                os.unlink(self.options.pid_file)
        shutil.rmtree(self.folder, ignore_errors=True)

    def last_words(self):
        """The last lines of the console, where a crashed kernel reports the reason."""
        try:
            with open(self.log, "rb") as log:
                lines = log.read().decode(errors="replace").splitlines()[-40:]
        except OSError:
            return ""
        return "\n".join(["guest: last console lines:"] + lines) if lines else ""


# ---- serving commands to other processes ---------------------------------------


def serve(guest, path):
    """Serves the control socket: a client sends one command line and receives
    "out LENGTH\\n" + bytes and "err LENGTH\\n" + bytes any number of times, then
    "exit N\\n", "killed\\n" or "error TEXT\\n". A client that closes or shuts
    down its writing side early kills its command."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(CHANNELS)

    def client(connection):
        with connection:
            try:
                line = b""
                while not line.endswith(b"\n"):
                    data = connection.recv(65536)
                    if not data:
                        return
                    line += data

                def output(stream, data):
                    connection.sendall(b"%s %d\n" % (stream, len(data)) + data)

                try:
                    status = guest.run(line, output, stop=connection)
                    connection.sendall(b"exit %d\n" % status)
                except Cancelled:
                    connection.sendall(b"killed\n")
                except GuestError as error:
                    connection.sendall(f"error {error}\n".encode())
            except OSError:
                pass

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=client, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def write(stream, data):
    file = sys.stdout if stream == b"out" else sys.stderr
    file.buffer.write(data)
    file.buffer.flush()


def execute(arguments):
    parser = argparse.ArgumentParser(
        prog="guest exec", description="Runs one command in a guest started with --control.")
    parser.add_argument("--control", required=True, metavar="PATH")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="kill it after so long")
    parser.add_argument("command")
    options = parser.parse_args(arguments)
    if "\n" in options.command:
        parser.error("the command must be one line; use ';'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + options.timeout if options.timeout else None

    def receive():
        nonlocal deadline
        if deadline is not None:
            left = deadline - time.monotonic()
            if not select.select([connection], [], [], max(0, left))[0]:
                # Requests the end of the command, whose last output still arrives.
                connection.shutdown(socket.SHUT_WR)
                deadline = None
        data = connection.recv(65536)
        if not data:
            fail("the guest is gone")
        return data

    try:
        connection.connect(options.control)
        connection.sendall(options.command.encode() + b"\n")
        buffer = b""
        while True:
            while b"\n" not in buffer:
                buffer += receive()
            line, buffer = buffer.split(b"\n", 1)
            word, _, rest = line.partition(b" ")
            if word == b"exit":
                sys.exit(int(rest))
            if word == b"killed":
                print(f"guest: killed after {options.timeout:g} s: {options.command}", file=sys.stderr)
                sys.exit(EXIT_TIMEOUT)
            if word == b"error":
                fail(rest.decode(errors="replace"))
            while len(buffer) < int(rest):
                buffer += receive()
            write(word, buffer[: int(rest)])
            buffer = buffer[int(rest) :]
    except OSError as error:
        fail(f"{options.control}: {error.strerror or error}; is the guest running?")


# ---- command line ---------------------------------------------------------------


def add_options(parser, memory, cpus):
    """Adds the options common to all kinds of guests."""
    parser.add_argument("--memory", type=int, default=memory, metavar="MIB")
    parser.add_argument("--cpus", type=int, default=cpus, metavar="N")
    parser.add_argument("--boot-timeout", type=float, default=120, metavar="SECONDS")
    parser.add_argument("--log", metavar="FILE", help="keep the guest's console here")
    parser.add_argument("--pid-file", metavar="FILE", help="QEMU's process id while it runs")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--cmd", metavar="COMMAND",
                      help="run it, print its output, stop, exit with its status")
    mode.add_argument("--control", metavar="PATH",
                      help="print READY, serve commands on this Unix socket until SIGTERM")
    mode.add_argument("--interactive", action="store_true",
                      help="a shell on this terminal; Ctrl-A X ends it")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="with --cmd: kill it after so long")
    parser.add_argument("--until-eof", action="store_true",
                        help="with --control: stop as well when standard input closes")


def check_host(options, suite=None):
    if not all(os.path.exists(built(suite, name)) for name in ("vmlinux", "initramfs.cpio")):
        fail(f"the guest is not built; run {BUILD}" + (f" --suite {suite}" if suite else ""))
    if options.control and os.path.exists(options.control):
        fail(f"{options.control} exists: another guest serves there, or remove it")


def run_guest(guest):
    """Boots the guest, and runs or serves commands; returns the exit status of the script."""
    options = guest.options

    def terminate(number, _frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, terminate)
    began = time.monotonic()
    serving = False
    try:
        guest.start()
        print(f"guest: up in {time.monotonic() - began:.1f} s", file=sys.stderr)
        if options.cmd is not None:
            print("READY", file=sys.stderr, flush=True)
            deadline = time.monotonic() + options.timeout if options.timeout else None
            return guest.run(options.cmd.encode(), write, deadline=deadline)
        if options.control:
            serve(guest, options.control)
            serving = True
            print("READY", flush=True)
            if options.until_eof:
                def until_eof():
                    while os.read(0, 4096):
                        pass
                    if not guest.stopping:
                        os.kill(os.getpid(), signal.SIGTERM)
                threading.Thread(target=until_eof, daemon=True).start()
        else:
            print("READY", file=sys.stderr, flush=True)
        status = guest.qemu.wait()
        if options.interactive:
            return status
        raise GuestError("the guest stopped by itself")
    except GuestError as error:
        # Let QEMU finish writing the console before it is quoted.
        try:
            guest.qemu and guest.qemu.wait(2)
        except subprocess.TimeoutExpired:
            pass
        words = guest.last_words()
        if words:
            print(words, file=sys.stderr)
        print(f"guest: error: {error}", file=sys.stderr)
        return EXIT_BROKEN
    except Cancelled:
        print(f"guest: killed after {options.timeout:g} s: {options.cmd}", file=sys.stderr)
        return EXIT_TIMEOUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as stop:
        # A serving guest ends by being told to stop.
        return 0 if serving else stop.code
    finally:
        guest.stop()
        if serving:
            os.unlink(options.control)
