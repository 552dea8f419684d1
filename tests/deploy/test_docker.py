"""Dockerfiles and the compose file: they start commands that there are, as a user that is not root."""

import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from jpaged.errors import InvalidArgument
from tests.deploy import dockerfile
from tests.deploy.dockerfile import ROOT, Dockerfile, is_in_context
from tests.deploy.servers import Server, health_port, serve_config

NAMES = ("cpu", "cuda", "tpu")
IGNORE = (ROOT / ".dockerignore").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def tracked() -> set[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listing.split("\0"))


def problems(image: Dockerfile) -> list[str]:
    """What is wrong with a Dockerfile."""
    found = []
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", image.text("USER")):
        found.append(f"USER is {image.text('USER') or 'root'}: a number above 0 is needed, for runAsNonRoot")
    for each in image.all("FROM", last_stage=False):
        if ":" not in each.words[0] or each.words[0].endswith(":latest"):
            found.append(f"FROM {each.words[0]} names no version")
    paths = tracked()
    for path in image.copied:
        if not any(name == path or name.startswith(f"{path}/") for name in paths):
            found.append(f"COPY {path}: git does not have it")
        if not is_in_context(path, IGNORE):
            found.append(f"COPY {path}: .dockerignore leaves it out")
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(each.text for each in image.instructions)):
        found += [f"pyproject.toml has no extra {name}" for name in extras.split(",") if name not in EXTRAS]
    if image.text("STOPSIGNAL") != "SIGTERM":
        found.append("STOPSIGNAL is not SIGTERM, at which the server drains")
    if image.environment.get("JPAGED_CACHE_DIR") not in image.all("VOLUME")[-1].words:
        found.append("JPAGED_CACHE_DIR is no volume")
    return found + _command_problems(image)


def _command_problems(image: Dockerfile) -> list[str]:
    try:
        config = serve_config([*image.entrypoint, *image.all("CMD")[-1].words])
        asked = health_port(image.health_command)
    except InvalidArgument as error:
        return [str(error)]
    if config is None:
        return ["the image does not serve"]
    exposed = frozenset(map(int, image.text("EXPOSE").split()))
    return [*Server(config, ports=exposed, probed={"HEALTHCHECK": asked}).problems()]


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_in_order(name):
    image = dockerfile.load(name)
    assert problems(image) == []
    assert image.num_stages == 2
    assert image.environment["JAX_PLATFORMS"] == name


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_an_accelerators_image_has_its_extra(name):
    assert f'".[{name}]"' in (ROOT / "deploy" / "docker" / f"Dockerfile.{name}").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("USER 10001:10001", "USER root", "USER is root"),
        ("USER 10001:10001\n", "", "USER is root"),
        ("USER 10001:10001", "USER 0", "USER is 0"),
        ("FROM python:3.12-slim\n", "FROM python\n", "FROM python names no version"),
        ("COPY jpaged ./jpaged", "COPY jpagde ./jpaged", "COPY jpagde: git does not have it"),
        ("COPY jpaged ./jpaged", "COPY tests ./tests", "COPY tests: .dockerignore leaves it out"),
        ("STOPSIGNAL SIGTERM\n", "", "STOPSIGNAL is not SIGTERM"),
        ("EXPOSE 50051 9400", "EXPOSE 50051", "ports are [50051]; the server opens 50051 and 9400"),
        ('CMD ["jpaged", "health"', 'CMD ["jpaged", "helth"', "invalid choice: 'helth'"),
        (
            'CMD ["jpaged", "health", "127.0.0.1:50052"]',
            'CMD ["jpaged", "health", "localhost:1"]',
            "HEALTHCHECK asks port 1; the server answers health on 50052",
        ),
        (
            'CMD ["jpaged", "health", "127.0.0.1:50052"]',
            'CMD ["jpaged", "health"]',
            "HEALTHCHECK asks port 50051; the server answers health on 50052",
        ),
        (', "--probe-port", "50052"', "", "probes share a port with strangers"),
        ("HEALTHCHECK --interval=10s", "LABEL a=", "[] does not run jpaged"),
        ('"--metrics-port", "9400"', '"--metric-port", "9400"', "--metric-port"),
        ('"--host", "0.0.0.0"', '"--host", "127.0.0.1"', "listens on 127.0.0.1"),
        ('VOLUME ["/var/cache/jpaged"]', 'VOLUME ["/cache"]', "JPAGED_CACHE_DIR is no volume"),
        ("constraint constraints.txt .", 'constraint constraints.txt ".[gpu]"', "pyproject.toml has no extra gpu"),
    ],
)
def test_a_planted_mistake_in_a_dockerfile_is_found(old, new, message):
    text = (ROOT / "deploy" / "docker" / "Dockerfile.cpu").read_text()
    assert old in text
    found = problems(Dockerfile(text.replace(old, new)))
    assert any(message in problem for problem in found), found


def test_what_is_built_on_a_host_stays_out_of_an_image():
    assert is_in_context("jpaged/cli/main.py", IGNORE)
    assert not is_in_context("jpaged/kernels/cpu/libjpaged_cpu.so", IGNORE)
    assert not is_in_context("jpaged/cli/__pycache__/main.pyc", IGNORE)
    assert not is_in_context(".venv/bin/python", IGNORE)


# --- compose ----------------------------------------------------------------------------------------------------------

SERVICE_KEYS = frozenset(
    (
        *("image", "build", "command", "environment", "ports", "volumes", "depends_on", "restart"),
        *("healthcheck", "stop_signal", "stop_grace_period"),
        *("read_only", "tmpfs", "cap_drop", "security_opt", "cpus", "mem_limit"),
    )
)
"""What the file uses of the compose specification; a key that is not here is a typing error, or to be added."""
SECONDS = {"s": 1, "m": 60, "h": 3600}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text()))


def seconds(text: str) -> float:
    return float(text[:-1]) * SECONDS[text[-1]]


def compose_problems(file: dict[str, Any]) -> list[str]:
    """What is wrong with a compose file."""
    found = []
    for name, service in file["services"].items():
        found += [f"{name}: {key} is no key of a service" for key in sorted(service.keys() - SERVICE_KEYS)]
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0]
            if not source.startswith(".") and source not in file["volumes"]:
                found.append(f"{name}: {source} is no volume")
        for other in service.get("depends_on", ()):
            if "healthcheck" not in file["services"].get(other, {}):
                found.append(f"{name}: waits for the health of {other}, which tells none")
    server = file["services"]["server"]
    if not (ROOT / "deploy" / server["build"]["context"] / server["build"]["dockerfile"]).is_file():
        found.append(f"server: there is no {server['build']['dockerfile']}")
    image = dockerfile.load(server["image"].partition(":")[2])
    words = [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", word) for word in server["command"]]
    try:
        config = serve_config([*image.entrypoint, *words])
        asked = health_port(server["healthcheck"]["test"][1:])
    except InvalidArgument as error:
        return [*found, f"server: {error}"]
    assert config is not None
    if server["ports"] != [f"127.0.0.1:{config.server.port}:{config.server.port}"]:
        found.append(f"server: ports {server['ports']} are not the server's {config.server.port} on this machine alone")
    described = Server(
        config,
        probed={"healthcheck": asked},
        grace_s=seconds(server["stop_grace_period"]),
        memory_gib=float(server["mem_limit"].removesuffix("g")),
    )
    return [*found, *(f"server: {problem}" for problem in described.problems())]


def test_the_compose_file_is_in_order():
    assert compose_problems(compose()) == []


@pytest.mark.parametrize(
    ("service", "key", "value", "message"),
    [
        ("server", "comand", [], "server: comand is no key of a service"),
        ("server", "command", ["demo", "--num-seqs", "4"], "unrecognized arguments: --num-seqs 4"),
        ("server", "command", ["demo", "--shutdown-timeout", "80"], "server: is killed after 75 s, not above the 82 s"),
        ("server", "command", ["demo", "--swap-space", "8"], "--swap-space 8 GiB does not fit into 6 GiB"),
        ("server", "ports", ["50051:50051"], "are not the server's 50051 on this machine alone"),
        ("server", "volumes", ["gone:/x"], "server: gone is no volume"),
        (
            "server",
            "healthcheck",
            {"test": ["CMD", "jpaged", "health", "localhost:1"]},
            "server: healthcheck asks port 1",
        ),
        ("server", "build", {"context": "..", "dockerfile": "Dockerfile"}, "there is no Dockerfile"),
        ("prometheus", "depends_on", {"gone": {}}, "waits for the health of gone"),
    ],
)
def test_a_planted_mistake_in_the_compose_file_is_found(service, key, value, message):
    file = compose()
    file["services"][service][key] = value
    assert any(message in problem for problem in compose_problems(file)), compose_problems(file)
