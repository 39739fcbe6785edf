"""What a name or path resolves to, and the sentence for each that resolves to nothing."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from jaxspec.config import ConfigError
from jaxspec.loading import open_checkpoint, resolve

module = importlib.import_module(
    "jaxspec.loading.resolve"
)  # the package's name `resolve` is the function


@pytest.fixture
def no_default(monkeypatch, tmp_path):
    default = importlib.import_module("jaxspec.loading.default_target")
    monkeypatch.setattr(default, "default_target", lambda: tmp_path / "the default")
    return tmp_path / "the default"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that holds one repository; what it was asked for is returned."""
    asked = []

    def download(repo, **kwargs):
        asked.append((repo, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize(
    "name",
    [None, "smollm2", "SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"],
)
def test_the_default_targets_names_resolve_to_it(name, no_default, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(name, kind="target") == no_default
    assert hub == []


@pytest.mark.parametrize("kind", ["target", "draft"])
@pytest.mark.parametrize("convert", [str, lambda p: p], ids=["str", "Path"])
def test_a_local_folder_resolves_to_itself(tmp_path, kind, convert, hub):
    (tmp_path / "smollm2").mkdir()
    assert resolve(convert(tmp_path / "smollm2"), kind=kind) == tmp_path / "smollm2"
    assert hub == []


def test_a_gguf_file_resolves_to_its_conversion_keyed_by_content(write_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    path = write_gguf()
    folder = resolve(path, kind="target")
    assert folder.parent == tmp_path / "cache" / "gguf"
    assert open_checkpoint(folder).config["model_type"] == "llama"
    assert resolve(str(path), kind="target") == folder
    other = resolve(write_gguf(tied=False), kind="target")  # the same file name, other content
    assert other != folder and folder.is_dir()


def test_a_drafts_name_is_looked_up_under_checkpoints(tmp_path, monkeypatch, hub):
    (tmp_path / "my-eagle3").mkdir()
    (tmp_path / "my-eagle3" / "config.json").write_text("{}")
    (tmp_path / "no-config").mkdir()
    monkeypatch.setattr(module, "CHECKPOINTS", tmp_path)
    assert resolve("my-eagle3", kind="draft") == tmp_path / "my-eagle3"
    assert hub == []
    assert resolve("my-eagle3", kind="target") == tmp_path  # the hub's: a head is no target
    assert [repo for repo, _ in hub] == ["my-eagle3"]
    assert list(module.own_drafts()) == ["my-eagle3"]


def test_checkpoints_is_the_repositorys_folder():
    assert (module.CHECKPOINTS.parent / "jaxspec" / "loading" / "resolve.py").is_file()
    assert module.CHECKPOINTS.name == "checkpoints"


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_the_hub_is_asked_for_weights_and_texts_and_a_pickle_for_drafts_only(hub, kind):
    resolve("someone/model", kind=kind)
    [(repo, options)] = hub
    assert repo == "someone/model"
    allowed = set(options["allow_patterns"])
    assert {"*.json", "*.safetensors", "*.jinja"} <= allowed
    assert ("pytorch_model.bin" in allowed) is ("README.md" in allowed) is (kind == "draft")
    assert options["ignore_patterns"] == ["*/*"]


def hub_error(kind):
    return kind(
        "401 not found\nfor url",
        response=SimpleNamespace(status_code=401, headers={}, request=None),
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_error(RepositoryNotFoundError),
            r"expected a hub id, .*, got no such repository on the hub \(or it is private",
        ),
        (hub_error(GatedRepoError), "no such repository on the hub"),
        (hub_error(HfHubHTTPError), "got an error from the hub: 401 not found$"),
        (
            LocalEntryNotFoundError("cannot connect"),
            r"got no local folder of that name and no hub that can be reached \(cannot connect\)",
        ),
        (OSError("no route"), r"no hub that can be reached \(no route\)"),
    ],
)
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_each_failure_of_the_hub_has_its_sentence(monkeypatch, error, message, kind):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(module, "hub_is_reachable", lambda: True)
    with pytest.raises(ConfigError, match=f"^{kind} someone/model: .*{message}"):
        resolve("someone/model", kind=kind)


def test_the_real_hub_client_offline_gives_the_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"^target someone/nothing: expected a hub id, .*no hub that can be reached",
    ):
        resolve("someone/nothing", kind="target")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("", "target", "target: expected a folder, a .gguf file, a name or a hub id, got ''"),
        ("  ", "draft", "draft: expected a folder"),
        (None, "draft", "draft: expected a folder, a .gguf file, a name or a hub id, got None"),
        ("/no/such/folder", "target", "target /no/such/folder: expected an existing folder"),
        ("./relative", "draft", "draft ./relative: expected an existing folder"),
        ("a/b/c", "target", "expected an existing folder"),
        ("../evil", "draft", "expected an existing folder"),
        ("nothing.gguf", "target", r"nothing.gguf: expected a .gguf file, got no such file"),
        (__file__, "target", "expected a folder or a .gguf file, got another file"),
    ],
)
def test_what_resolves_to_nothing_is_refused_without_asking_the_hub(name, kind, message, hub):
    with pytest.raises(ConfigError, match=message):
        resolve(name, kind=kind)
    assert hub == []


def test_the_message_lists_the_repositorys_own_drafts(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(module, "CHECKPOINTS", tmp_path)
    with pytest.raises(ConfigError, match=r"a name under checkpoints/ \(one, two\)"):
        resolve("./three", kind="draft")


@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("someone/model", "someone/model", None),
        ("someone/model@0123abc", "someone/model", "0123abc"),
        ("someone/model@refs/pr/1", "someone/model", "refs/pr/1"),
    ],
)
def test_a_hub_id_may_name_its_revision(hub, name, repository, revision):
    resolve(name, kind="target")
    [(asked, options)] = hub
    assert (asked, options["revision"]) == (repository, revision)


@pytest.mark.parametrize(
    ("files", "method"),
    [
        ({"config.json": {}}, None),
        ({"config.json": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"config.json": {"compression_config": {"quant_method": "other"}}}, "other"),
        ({"config.json": {}, "hf_quant_config.json": {"quantization": {}}}, "modelopt"),
    ],
)
def test_a_config_without_weights_has_the_quantisation_of_older_files(
    files, method, tmp_path, monkeypatch
):
    """Of a folder, of its file, and of a hub id."""
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))

    def download(repo, name, **kwargs):
        if name not in files:
            raise EntryNotFoundError("not found")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(module, "hub_is_reachable", lambda: True)
    for name in (tmp_path, tmp_path / "config.json", "someone/model"):
        config = module.read_config(str(name))
        assert config.get("quantization_config", {}).get("quant_method") == method, name
        assert "compression_config" not in config


@pytest.mark.parametrize("key", [None, "quantization_config", "compression_config"])
def test_modelopts_file_is_read_only_where_config_json_names_no_quantisation(
    key, tmp_path, monkeypatch
):
    """Of a folder as of a hub id; a damaged file shows whether it was read."""
    written = {} if key is None else {key: {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    asked = []

    def download(repo, name, **kwargs):
        asked.append(name)
        if name == module.MODELOPT:
            (tmp_path / name).write_text("no JSON")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(module, "hub_is_reachable", lambda: True)

    def method_of(name):
        return module.read_config(name)["quantization_config"]["quant_method"]

    if key is None:
        with pytest.raises(ConfigError, match=f"{module.MODELOPT}: expected valid JSON"):
            method_of("someone/model")
        assert asked == ["config.json", module.MODELOPT]
        return
    assert method_of("someone/model") == "fp8"
    assert asked == ["config.json"]
    (tmp_path / module.MODELOPT).write_text("no JSON")
    for folder_or_file in (tmp_path, tmp_path / "config.json"):
        assert method_of(str(folder_or_file)) == "fp8"


def test_a_hub_that_does_not_answer_is_not_tried_again(monkeypatch, tmp_path):
    """What the cache has is used; the library's own attempts take half a minute."""
    for name in module.PROXIES:
        monkeypatch.delenv(name, raising=False)

    def refuse(address, timeout):
        raise OSError("no route")

    monkeypatch.setattr(module.socket, "create_connection", refuse)
    assert not module.hub_is_reachable()
    asked = []

    def download(repo, *, local_files_only, **kwargs):
        asked.append(local_files_only)
        if repo == "someone/cached":
            return str(tmp_path)
        raise LocalEntryNotFoundError("outgoing traffic has been disabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("someone/cached", kind="target") == tmp_path
    with pytest.raises(ConfigError, match="the hub's host does not answer"):
        resolve("someone/model", kind="target")
    assert asked == [True, True]
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert module.hub_is_reachable()
