"""The text room: tokens without a network, shards that refuse what they are not, batches that know no ranks."""

import contextlib
import fcntl
import hashlib
import http.server
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.corpus import Batches, encoding, plays, shakespeare, shards, storage, tokenizer
from gpt2lab.corpus.downloads import Download, NoDownload, fetch
from gpt2lab.corpus.storage import packaged


@pytest.fixture
def shard(tmp_path):
    return shards.write_shard(tmp_path / "numbers.bin", [np.arange(1000), np.arange(50000, 50257)])


def run_python(code, **environment):
    """Run code in a fresh interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- tokenizer


def test_known_tokens():
    encode = encoding()
    assert encode.n_vocab == tokenizer.VOCABULARY
    assert encode.encode("Hello world") == [15496, 995]
    assert encode.encode("Every effort moves you") == [6109, 3626, 6100, 345]
    assert encode.encode("<|endoftext|>", allowed_special="all") == [tokenizer.END_OF_TEXT_TOKEN]


def test_the_merges_are_the_published_ones():
    digest = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    assert hashlib.sha256(packaged("vocab.bpe")).hexdigest() == digest


def test_all_bytes_come_back_and_each_token_has_its_number():
    encode = encoding()
    assert [encode.decode_single_token_bytes(n) for n in (0, 94, 188, 220, 255, 256)] == [
        b"!", b"\xa1", b"\x00", b" ", b"\xad", b" t"
    ]  # fmt: skip
    for byte in map(bytes, zip(range(256), strict=True)):
        assert encode.decode_single_token_bytes(encode.encode_single_token(byte)) == byte
    odd = "".join(map(chr, range(1024))) + "\u2028 \U0001f600\ufeff  \n x"
    assert encode.decode(encode.encode(odd)) == odd


def test_tokens_need_no_network_and_no_file_of_the_user(tmp_path):
    code = """
import socket
def no_network(*a, **k): raise AssertionError("asked the network")
socket.getaddrinfo = socket.create_connection = no_network
from gpt2lab.corpus import encoding
print(encoding().encode("Hello world"))
"""
    places = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TIKTOKEN_CACHE_DIR")}
    assert run_python(code, **places) == "[15496, 995]\n"
    assert not list(tmp_path.iterdir())


# ---- text and shards


def test_the_plays_are_the_published_ones():
    assert len(plays().encode()) == 1_271_816
    digest = "edf7ea89cee5f9544a62d6edb2d4008ffdce5b3033646607e8fd79315b5290d8"
    assert hashlib.sha256(plays().encode()).hexdigest() == digest
    assert len(shakespeare()) == 397_272
    assert encoding().decode(shakespeare()[:]) == plays()


def test_the_plays_are_tokenised_once(monkeypatch):
    shakespeare()
    monkeypatch.setattr(shards, "tokenise", None)  # a second time would fail
    assert len(shakespeare()) == 397_272


def test_round_trip(shard):
    assert len(shard) == 1257
    assert np.array_equal(shard[:], [*range(1000), *range(50000, 50257)])
    header = np.fromfile(shard.path, "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 1257] and not header[3:].any()


def test_a_shard_travels_to_a_rank_as_its_path(shard):
    sent = pickle.dumps(shard)
    assert len(sent) < 1000 and np.array_equal(pickle.loads(sent)[:], shard[:])


DAMAGE = {  # the word of the header that is wrong (-1: none), its value, how many bytes are cut off, what is said
    "no shard": (
        0,
        20240326,
        0,
        r"numbers\.bin is not a token shard: it begins with 20240326 instead of 2024",
    ),
    "of another version": (1, 2, 0, r"numbers\.bin is a shard of version 2, not of version 1"),
    "too many tokens": (2, 7, 0, r"says 7 tokens \(1038 bytes\), but the file holds 1257 \(3538 bytes\)"),
    "a token less": (-1, 0, 2, r"says 1257 tokens \(3538 bytes\), but the file holds 1256 \(3536 bytes\)"),
    "half a token": (-1, 0, 1, r"says 1257 tokens \(3538 bytes\), but the file holds 1256 \(3537 bytes\)"),
    "no whole header": (-1, 0, 2600, r"has 938 bytes, but a header alone has 1024"),
}


@pytest.mark.parametrize("word, value, cut, said", DAMAGE.values(), ids=DAMAGE)
def test_a_spoilt_shard_is_refused_by_name(shard, word, value, cut, said):
    data = bytearray(shard.path.read_bytes())
    if word >= 0:
        data[4 * word : 4 * word + 4] = np.array([value], "<i4").tobytes()
    shard.path.write_bytes(data[: len(data) - cut])
    with pytest.raises(ValueError, match=said):
        shards.Shard(shard.path)


def test_a_failed_write_leaves_the_old_shard(shard):
    before = shard.path.read_bytes()

    def pieces():
        yield np.arange(5)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="fire"):
        shards.write_shard(shard.path, pieces())
    assert shard.path.read_bytes() == before
    assert [p.name for p in shard.path.parent.iterdir()] == ["numbers.bin"]


def test_a_token_beyond_16_bits_is_refused(tmp_path):
    for token in (65536, -1, 2.5):
        with pytest.raises(ValueError, match=f"Token {token} does not fit"):
            shards.write_shard(tmp_path / "x.bin", [np.array([5, token])])


AWKWARD = (
    "It's\t a\x1c b  \n\n  line\r\n of  'll\u00a0we\u2003 \n<|endoftext|> \n next 12 345\n\n\nNaïve 日本語. \n"
    * 40
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_tokens_do_not_depend_on_how_the_text_arrives(size):
    whole = encoding().encode(AWKWARD, allowed_special="all")
    parts = [AWKWARD[i : i + size] for i in range(0, len(AWKWARD), size)]
    assert np.concatenate(list(shards.tokenise(parts))).tolist() == whole


def test_a_text_without_spaces_stays_within_the_memory(monkeypatch):
    monkeypatch.setattr(shards, "LONGEST_WORD", 100)
    pieces = list(shards.tokenise(["x" * 60] * 10))
    assert len(pieces) > 3 and encoding().decode(np.concatenate(pieces)) == "x" * 600


def test_text_that_is_not_utf8_is_named(tmp_path):
    text = tmp_path / "latin.txt"
    text.write_bytes("café".encode("latin1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 .*iconv"):
        list(shards.read_text(text))


GROWTH = """
import resource, sys
from pathlib import Path
from gpt2lab.corpus import shards, encoding, plays
encoding().encode_to_numpy(plays()[:100000])
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
shards.write_shard(Path(sys.argv[1] + ".bin"), shards.tokenise(shards.read_text(sys.argv[1], 1 << 16)))
print(peak() - before)
"""


@pytest.mark.rotates
def test_memory_does_not_grow_with_the_text(tmp_path):
    """Twelve MB of text, whose tokens alone would be 100 MB as Python numbers, within 10 MB: 200 MB hold no more."""
    text = tmp_path / "long.txt"
    text.write_text(plays() * 10)
    assert int(run_python(GROWTH.replace("sys.argv[1]", repr(str(text))))) < 10e6


# ---- batches


@pytest.fixture
def batches():
    return Batches(shakespeare(), rows=7, length=16, seed=3)


def same(a, b):
    fields = ("tokens", "targets", "positions", "samples")
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields) and a.total == b.total


def test_targets_are_the_next_tokens(batches):
    batch = batches.at(5)
    assert batch.tokens.shape == batch.targets.shape == (7, 16) and batch.total == 112
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.samples.tolist() == list(range(35, 42))
    text = shakespeare()[:].tobytes()
    for row, target in zip(batch.tokens, batch.targets, strict=True):
        window = np.append(row.numpy(), target[-1:].numpy()).astype("<u2")
        assert window.tobytes() in text


def test_a_batch_is_a_function_of_seed_and_step(batches):
    again = Batches(shakespeare()[:], rows=7, length=16, seed=3)
    batches.at(9)  # no state is left behind
    assert same(batches.at(4), again.at(4))
    assert not torch.equal(batches.at(4).tokens, batches.at(5).tokens)
    assert not torch.equal(batches.at(4).tokens, Batches(shakespeare(), 7, 16, seed=4).at(4).tokens)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 9])
def test_ranks_see_the_same_global_batch(batches, ranks):
    whole = batches.at(2)
    shares = [whole.rows(r, ranks) for r in range(ranks)]
    assert torch.equal(torch.cat([s.tokens for s in shares]), whole.tokens)
    assert torch.equal(torch.cat([s.samples for s in shares]), whole.samples)
    assert {s.total for s in shares} == {112}
    assert max(len(s.samples) for s in shares) - min(len(s.samples) for s in shares) <= 1


def test_only_the_asked_rows_are_read(batches):
    whole = batches.at(2)
    some = batches.at(2, rows=range(3, 6))
    assert torch.equal(some.tokens, whole.tokens[3:6]) and some.total == whole.total
    assert batches.at(2, rows=range(0)).tokens.shape == (0, 16)
    with pytest.raises(ValueError, match="7 rows"):
        batches.at(2, rows=range(5, 8))


def test_batch_size_does_not_change_the_samples():
    """Sample 12 is the same window whether it is row 5 of a batch of 7 or row 0 of a batch of 4."""
    of_seven, of_four = Batches(shakespeare(), 7, 16).at(1), Batches(shakespeare(), 4, 16).at(3)
    assert torch.equal(of_seven.tokens[5], of_four.tokens[0])


def test_micro_batches_and_columns(batches):
    whole = batches.at(0)
    micro = whole.micro(3)
    assert [len(m.samples) for m in micro] == [3, 2, 2] and {m.total for m in micro} == {112}
    assert torch.equal(torch.cat([m.targets for m in micro]), whole.targets)
    every_second = whole.columns(torch.arange(1, 16, 2))
    assert torch.equal(every_second.positions, torch.arange(1, 16, 2))
    assert torch.equal(every_second.targets, whole.targets[:, 1::2])


def test_train_and_validation_do_not_overlap():
    tokens = np.arange(1000)
    train, val = Batches(tokens, 50, 8), Batches(tokens, 50, 8, split="val")
    assert max(int(train.at(s).targets.max()) for s in range(20)) <= 899
    assert min(int(val.at(s).tokens.min()) for s in range(20)) >= 900


def test_asking_for_more_tokens_than_there_are():
    with pytest.raises(ValueError, match="900 tokens needs 901 tokens, .* train split .* 900.*at most 899"):
        Batches(np.arange(1000), 1, 900)
    assert Batches(np.arange(1000), 1, 899).at(0).tokens[0].tolist() == list(range(899))


# ---- downloads, from a server on this machine

CONTENT = bytes(range(256)) * 5000


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT; /norange cannot resume, /short breaks off, /wrong sends others of that length, /long more."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Range"]))
        first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        resumes = first and self.path != "/norange"
        body = {"/wrong": CONTENT[::-1], "/long": CONTENT + b"more"}.get(self.path, CONTENT)
        body = body[first if resumes else 0 :]
        self.send_response(206 if resumes else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1000] if self.path == "/short" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def item(server, path="/file"):
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Download(f"http://127.0.0.1:{server.server_port}{path}", len(CONTENT), digest, "deep/file.txt")


def test_download_once(server, tmp_path):
    for _ in range(2):
        assert fetch(item(server), tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 1
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file.txt"]


@pytest.mark.parametrize("path", ["/file", "/norange"])
def test_a_broken_download_goes_on(server, tmp_path, path):
    with pytest.raises(NoDownload, match=r"1000 of 1280000 bytes|cannot be read"):
        fetch(item(server, "/short"), tmp_path)
    assert not (tmp_path / "deep/file.txt").exists()
    assert fetch(item(server, path), tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == (path, "bytes=1000-")


def test_wrong_content_is_refused_and_not_kept(server, tmp_path):
    with pytest.raises(NoDownload, match="not the published file: 1280000 bytes with sha256"):
        fetch(item(server, "/wrong"), tmp_path)
    assert not any(file.read_bytes() for file in (tmp_path / "deep").iterdir())
    assert fetch(item(server), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("other, asked", [("/file", None), ("/short", "bytes=1000-"), ("/wrong", "bytes=0-")])
def test_a_download_goes_on_from_what_another_process_has_left(other, asked, server, tmp_path, monkeypatch):
    def flock(*_):  # granted when the other process has had its turn
        monkeypatch.undo()
        with contextlib.suppress(NoDownload):
            fetch(item(server, other), tmp_path)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert fetch(item(server), tmp_path).read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.txt"]
    assert [first for _, first in server.asked] == ["bytes=0-"] + [asked] * (asked is not None)


def test_a_longer_file_is_not_the_published_one(server, tmp_path):
    with pytest.raises(NoDownload, match="is not the published file"):
        fetch(item(server, "/long"), tmp_path)


def test_a_cache_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    home, spare = tmp_path / "home", tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(storage.tempfile, "tempdir", str(spare))
    mask = os.umask(0o002)
    try:
        assert storage.cache_dir("shards") == home / "gpt2lab/shards"
    finally:
        os.umask(mask)
    (home / "gpt2lab").chmod(0o775)  # made so by an earlier version
    assert storage.cache_dir("shards") == home / "gpt2lab/shards"
    (home / "gpt2lab").chmod(0o777)
    assert storage.cache_dir("shards").is_relative_to(spare)


def test_a_file_laid_there_by_hand_is_checked(server, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/file.txt").write_bytes(b"something else")
    with pytest.raises(NoDownload, match=r"14 bytes .* expected 1280000 bytes"):
        fetch(item(server), tmp_path)
    (tmp_path / "deep/file.txt").write_bytes(CONTENT)
    assert fetch(item(server), tmp_path).read_bytes() == CONTENT and not server.asked


def test_without_a_network_the_way_out_is_named(tmp_path):
    nowhere = Download("http://127.0.0.1:9/file", 10, "0" * 64, "file.txt")
    with pytest.raises(NoDownload, match=r"No lesson needs it\. .* copy the file to .*file\.txt yourself"):
        fetch(nowhere, tmp_path)


# ---- the command


def run_data(*arguments):
    return main(["data", *map(str, arguments)])


def test_a_file_that_is_no_shard_is_not_replaced_unless_it_is_named(tmp_path, capsys):
    (text := tmp_path / "my.txt").write_text("To be, or not to be")
    (mine := text.with_suffix(".bin")).write_bytes(b"not tokens")
    assert run_data("--text", text) == 2 and mine.read_bytes() == b"not tokens"
    assert capsys.readouterr().err.startswith(
        f"gpt2lab data: {mine} is there already and is no shard of tokens."
    )
    for named in (["--out", mine], []):
        assert run_data("--text", text, *named) == 0


def test_data_makes_a_shard_of_my_text(tmp_path, capsys):
    text = tmp_path / "my.txt"
    text.write_text(plays()[:20000])
    assert run_data("--text", text) == 0
    shown = capsys.readouterr().out
    shard = shards.Shard(tmp_path / "my.bin")
    assert encoding().decode(shard[:]) == plays()[:20000]
    assert f"{len(shard):,} tokens" in shown and f"train --data {tmp_path / 'my.bin'}" in shown


def test_data_says_what_is_wrong(tmp_path, capsys):
    assert run_data("--text", tmp_path / "none.txt") == 2
    said = f"gpt2lab data: {tmp_path / 'none.txt'}: No such file or directory. Check its name.\n"
    assert capsys.readouterr().err == said
    text = tmp_path / "my.bin"
    text.write_text("words")
    assert run_data("--text", text) == 2
    assert "overwrite its own text" in capsys.readouterr().err
