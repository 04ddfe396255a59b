from __future__ import annotations

import pytest
from pydantic import Field

from sim.errors import InputError, UsageError
from sim.spec.fields import Count, Doc, StatedBytes
from sim.spec.load import MAX_FILE_BYTES, parse_text, problems_of, read_source, validate
from sim.spec.overrides import apply_overrides


class Inner(Doc):
    memory: StatedBytes
    count: Count = Field(default=1, ge=1)


class Outer(Doc):
    name: str
    parts: tuple[Inner, ...] = Field(min_length=1)


GOOD = """\
# a comment
name: x
parts:
  - memory: 24 GiB
  - memory: {value: 1 GB, source: a book}
    count: 2
"""


def read(text: str, *overrides: str) -> Outer:
    return validate(Outer, apply_overrides(parse_text(text, "f.yaml"), overrides))


def test_reads_quantities_and_origins():
    doc = read(GOOD)
    assert doc.parts[0].memory.value == 24 * 2**30
    assert (doc.parts[1].memory.value, doc.parts[1].memory.source) == (1e9, "a book")


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "text"),
    [
        ("count: 2", "cuont: 2", 6, "parts.1.cuont", "nearest valid key is count"),
        ("source: a", "sorce: a", 5, "parts.1.memory.sorce", "nearest valid key is source"),
        ("24 GiB", "24", 4, "parts.0.memory", "without its unit"),
        ("24 GiB", "24 GB/s", 4, "parts.0.memory", "unit of bytes/s"),
        ("count: 2", "count: 0", 6, "parts.1.count", "greater than or equal to 1"),
        ("count: 2", "count: 1.5", 6, "parts.1.count", "not a whole number"),
        ("name: x", "name: 3", 2, "name", "wrong type"),
        ("name: x\n", "", 0, "name", "required key is missing"),
        ("name: x", "name: x\nname: y", 3, "", "duplicate key"),
        ("name: x", "name: !foo x", 2, "name", "tags are not allowed"),
        ("name: x", "name: !!python/object:os.system {a: b}", 2, "name", "tags are not allowed"),
        ("name: x", "name: [x", 0, "", "not valid YAML"),
        ("name: x", "3: x", 2, "", "a key that is not text"),
    ],
)
def test_errors_name_file_line_and_key(old, new, line, key, text):
    with pytest.raises(InputError) as error:
        read(GOOD.replace(old, new, 1))
    assert error.value.file == "f.yaml"
    assert text in error.value.message
    assert error.value.key == key
    if line:
        assert error.value.line == line


def test_only_the_cause_is_reported_and_the_rest_counted():
    with pytest.raises(InputError) as error:
        read("name: 3\nparts:\n  - memory: 1\n")
    assert error.value.message.endswith("(and 1 more)")
    with pytest.raises(InputError, match=r"parts\.0\.memory: a number without its unit"):
        read("name: x\nparts:\n  - memory: 1\n")


def test_all_problems_can_be_had():
    source = parse_text("name: 3\nparts:\n  - memory: 1\n    size: 2\n", "f.yaml")
    found = problems_of(Outer, source)
    assert [(p.file, p.line, p.key) for p in found] == [
        ("f.yaml", 1, "name"),
        ("f.yaml", 3, "parts.0.memory"),
        ("f.yaml", 4, "parts.0.size"),
    ]
    assert problems_of(Outer, parse_text(GOOD)) == []


def test_unknown_keys_hide_nothing():
    text = "nmae: x\nparts:\n  - {memory: 1 GB, size: 2, cuont: 3}\n  - {memory: 1, x: 2}\nzzz: 1\n"
    found = problems_of(Outer, parse_text(text, "f.yaml"))
    assert [(p.line, p.key) for p in found] == [
        (1, "nmae"),
        (3, "parts.0.size"),
        (3, "parts.0.cuont"),
        (4, "parts.1.x"),
        (4, "parts.1.memory"),
        (5, "zzz"),
    ]


def test_what_an_option_set_is_blamed_on_the_option():
    with pytest.raises(InputError) as error:
        read(GOOD, "parts.1={memory: 1}")
    assert (error.value.file, error.value.line) == ("--set parts.1={memory: 1}", 0)
    with pytest.raises(InputError, match=r"^f.yaml:2:name: wrong type"):
        read(GOOD.replace("name: x", "name: 3"), "parts.0.count=2")
    with pytest.raises(InputError, match=r"^--set job.parts.9.count=1:parts.9: no such list entry"):
        apply_overrides(parse_text(GOOD, "f.yaml"), ["parts.9.count=1"], "job")


def test_yaml_is_version_1_2():
    data = parse_text("a: 989e12\nb: on\nc: 12:30:45\nd: 2024-05-01\ne: 010\n").data
    assert data == {"a": 989e12, "b": "on", "c": "12:30:45", "d": "2024-05-01", "e": 10}


@pytest.mark.parametrize("text", ["", "[1, 2]", "just text"])
def test_the_top_must_be_a_mapping(text):
    with pytest.raises(InputError, match="not a mapping"):
        parse_text(text)


def test_aliases_work_and_alias_bombs_do_not():
    assert parse_text("a: &x {k: 1}\nb: *x\n").data == {"a": {"k": 1}, "b": {"k": 1}}
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
    )
    with pytest.raises(InputError, match="more than"):
        parse_text(bomb)


def test_files_are_checked_before_they_are_parsed(tmp_path):
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="at most"):
        read_source(big)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe9\n")
    with pytest.raises(InputError, match="not UTF-8 text at byte 3"):
        read_source(latin)
    with pytest.raises(InputError, match="cannot read it"):
        read_source(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "duplicate key"),
        ('{"a": 1,\n "b": }', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_is_strict(text, message):
    with pytest.raises(InputError, match=message):
        parse_text(text, "c.json")


def test_yaml_nested_too_deeply_is_refused():
    with pytest.raises(InputError, match="nested too deeply"):
        parse_text("a: " + "[" * 1500 + "]" * 1500)


def test_json_with_tabs_is_read():
    assert parse_text('{\n\t"a": [1,\n\t2]\n}', "c.json").data == {"a": [1, 2]}


def test_overrides_replace_create_and_index():
    doc = read(GOOD, "parts.1.count=4k", "name=y z", "parts.0.memory={value: 2 GB, source: s}")
    assert (doc.name, doc.parts[1].count, doc.parts[0].memory.source) == ("y z", 4000, "s")
    assert apply_overrides(parse_text("a: 1"), ["b.c=2"]).data == {"a": 1, "b": {"c": 2}}


def test_overrides_leave_the_source_unchanged():
    source = parse_text(GOOD)
    apply_overrides(source, ["parts.0.memory=1 GB"])
    assert source.data["parts"][0]["memory"] == "24 GiB"


@pytest.mark.parametrize(
    ("override", "error", "text"),
    [
        ("name", UsageError, "expected path=value"),
        ("=3", UsageError, "expected path=value"),
        ("parts.7.count=1", InputError, "an index from 0 to 1"),
        ("name.x=1", InputError, "goes through a value"),
        ("nmae=1", InputError, "nearest valid key is name"),
        ("parts.0.count=[1", InputError, "--set parts.0.count"),
    ],
)
def test_wrong_overrides(override, error, text):
    with pytest.raises(error) as caught:
        read(GOOD, override)
    assert text in str(caught.value)
