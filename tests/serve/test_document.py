"""The OpenAPI document of the server, and requests that schemathesis makes from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.server import running


@pytest.mark.fuzz
def test_requests_made_from_the_document(tmp_path: Path, emoji: dict[str, list[bytes]]) -> None:
    """Answers keep to the document, wrong requests are refused, and nothing is answered without the token.

    Not tried: the endless stream of events, and zip files, which schemathesis does not make. Right requests may be
    refused, because a document cannot say that `DELETE /api/waiting` needs one of two parameters. Of an address with
    several methods, Starlette's header Allow names the first.
    """
    pytest.importorskip("schemathesis")
    with running(tmp_path / "model", tmp_path / "cache", host="0.0.0.0", method="simplecil") as server:
        server.teach({"fox": emoji["fox"][:3], "owl": emoji["owl"][:3]})
        token = f"Authorization: {server.client.headers['Authorization']}"
        tool, address = Path(sys.executable).with_name("schemathesis"), f"{server.client.base_url}/api/openapi.json"
        words = [str(tool), "run", address, "-H", token, "--exclude-path-regex", "events|upload"]
        words += ["--exclude-checks", "positive_data_acceptance,allow_header_conformance"]
        words += ["--max-examples", "5", "--request-timeout", "120"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout
