"""Everything that belongs to a tenant has a name that no other tenant can arrive at."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal.keys import block_keys, part_hash
from cairn.journal.tenants import (
    LOCAL,
    NAME_MAX,
    is_tenant,
    session_id,
    session_name,
    session_tenant,
    tenant_secret,
)
from tests.journal.model import profile

ROOT = b"a root secret"
TENANTS = st.sampled_from([LOCAL, "a", "a.b", "alice", "bob", "Alice", "local2"])
# Names with any characters that have a meaning in an id.
NAMES = st.text(st.sampled_from("@/.-ab9 ü"), max_size=8) | st.sampled_from(
    ["@alice/x", "alice/x", "/x", "@local/x", "@@", "local", "3f0c-77"]
)


def keys_of(tenant: str, ids: list[int]) -> tuple[str, ...]:
    """The keys of a tenant's tokens."""
    secret = tenant_secret(ROOT, tenant)
    return block_keys(secret=secret, fingerprint="fp", tenant=tenant, ids=ids, block_tokens=4)


def test_two_tenants_share_no_key():
    """The same tokens and the same words have different names for different tenants."""
    ids = list(range(32))
    assert not set(keys_of("alice", ids)) & set(keys_of("bob", ids))
    assert not set(keys_of("alice", ids)) & set(keys_of(LOCAL, ids))
    names = {
        part_hash(
            secret=tenant_secret(ROOT, tenant),
            tenant=tenant,
            parent="",
            label="user",
            content=b"Hello",
        )
        for tenant in ("alice", "bob", LOCAL)
    }
    assert 3 == len(names)


def test_one_tenant_shares_its_keys():
    """The control: within a tenant, the same tokens have the same names, as far as they agree."""
    ids = list(range(32))
    assert keys_of("alice", ids) == keys_of("alice", ids)
    assert keys_of("alice", ids)[:4] == keys_of("alice", ids[:16] + [7] * 16)[:4]


@pytest.mark.slow
def test_the_secret_alone_keeps_tenants_apart():
    """Even under one name, two secrets give nothing in common."""
    ids = list(range(8))

    def keys(tenant: str) -> set[str]:
        secret = tenant_secret(ROOT, tenant)
        return set(block_keys(secret=secret, fingerprint="fp", tenant="t", ids=ids, block_tokens=4))

    assert not keys("alice") & keys("bob")


def test_a_secret_is_what_it_always_was():
    """
    It follows from the data directory's secret and the name alone, so that a restart, a new API key
    or a different version changes no name: a MAC over length-framed fields, written out here.
    """
    fields = struct.pack("<Q", 12) + b"cairn tenant" + struct.pack("<Q", 5) + b"alice"
    assert hmac.new(ROOT, fields, hashlib.sha256).digest() == tenant_secret(ROOT, "alice")
    assert ROOT == tenant_secret(ROOT, LOCAL)
    assert tenant_secret(b"another", "alice") != tenant_secret(ROOT, "alice")


@profile(300)
@given(TENANTS, NAMES, TENANTS, NAMES)
def test_an_id_is_of_one_tenant_and_one_name(one: str, name: str, other: str, called: str):
    """Two have the same id only if tenant and name are the same; the name can be read from it."""
    assert (session_id(one, name) == session_id(other, called)) == ((one, name) == (other, called))
    assert name == session_name(session_id(one, name))


def test_ids_without_keys_are_the_names():
    """A server without keys finds its sessions under the ids that they always had."""
    for name in ("the one", "a/b", "me@home", "größe", "3f2a1b00-0000-4000-8000-000000000000"):
        assert name == session_id(LOCAL, name)
    assert "@alice/a/b" == session_id("alice", "a/b")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alice", True),
        ("Alice-2.b_c", True),
        ("9", True),
        ("a" * NAME_MAX, True),
        ("a" * (NAME_MAX + 1), False),
        ("", False),
        ("a/b", False),
        ("@a", False),
        (".a", False),
        ("a b", False),
        ("größe", False),
        ("a\n", False),
    ],
)
def test_names_of_tenants(name: str, expected: bool):
    """They have no character with a meaning in an id, and no control characters."""
    assert expected == is_tenant(name)


@given(TENANTS, NAMES)
@profile(60)
def test_the_tenant_of_a_session(tenant: str, name: str):
    """The id of a session says whose it is, whatever its name is."""
    assert tenant == session_tenant(session_id(tenant, name))
