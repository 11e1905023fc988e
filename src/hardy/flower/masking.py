"""Secure aggregation: what is added to a vector so that only the sum of all can be read.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. Numbers are whole,
modulo 2^64. Two clients u < v agree on a key (X25519); u adds the stream of that key (ChaCha20) to its vector, and v
subtracts it, so that it is gone from the sum. Each also adds a stream of its own. If v is lost after keys were shared,
the others give the server the shares (Shamir) of v's private key, and of those that stayed the shares of their own
streams; never both of one client, for then its vector could be read.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Whole = NDArray[np.uint64]
FRACTION = 32
"""bits behind the point"""
_PRIME = 2**521 - 1
_SHARE = 66
"""bytes of a share"""
_SECRET = 32


def encode(values: NDArray[np.float64]) -> Whole:
    """Numbers as whole ones modulo 2^64, rounded to 2^-32.

    Sums of encoded numbers are exact: rounding happens here alone.
    >>> decode(encode(np.array([0.5, -0.25])) + encode(np.array([0.25, -3.0]))).tolist()
    [0.75, -3.25]
    """
    if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) >= 2.0 ** (62 - FRACTION):
        raise HardyError(f"a client's share of the sum is not below 2^{62 - FRACTION}, so it cannot be masked.")
    whole: Whole = np.rint(values * 2.0**FRACTION).astype(np.int64).view(np.uint64)
    return whole


def decode(whole: Whole) -> NDArray[np.float64]:
    """The numbers again, in [-2^31, 2^31)."""
    values: NDArray[np.float64] = whole.view(np.int64).astype(np.float64) * 2.0**-FRACTION
    return values


def keystream(key: bytes, size: int) -> Whole:
    """Numbers that nobody can guess without the key, uniform modulo 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    made = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * size))
    return np.frombuffer(made, "<u8").astype(np.uint64)


def split(secret: bytes, count: int, needed: int) -> list[bytes]:
    """Shares of a secret of 32 bytes, of which so many are needed to know anything of it (Shamir 1979)."""
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(needed - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for factor in reversed(factors):
            value = (value * x + factor) % _PRIME
        shares.append(value.to_bytes(_SHARE, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret from shares by their place, counted from 1."""
    secret = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above, below = above * other % _PRIME, below * (other - x) % _PRIME
        secret = (secret + int.from_bytes(share, "big") * above * pow(below, -1, _PRIME)) % _PRIME
    try:
        return secret.to_bytes(_SECRET, "big")
    except OverflowError:
        raise HardyError("the shares of a secret do not fit together: a node has given a false one.") from None


@dataclass(frozen=True)
class KeyPair:
    """Of X25519, as bytes."""

    private: bytes
    public: bytes

    @staticmethod
    def new() -> "KeyPair":
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return KeyPair.of(X25519PrivateKey.generate().private_bytes_raw())

    @staticmethod
    def of(private: bytes) -> "KeyPair":
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return KeyPair(private, X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())

    def agree(self, public: bytes, *words: Any) -> bytes:
        """The key shared with the owner of a public key, for one purpose."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = X25519PrivateKey.from_private_bytes(self.private).exchange(X25519PublicKey.from_public_bytes(public))
        return bytes(HKDF(SHA256(), 32, None, "|".join(map(str, ("hardy", *words))).encode()).derive(secret))


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypted and authenticated; a key is used once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return bytes(ChaCha20Poly1305(key).encrypt(bytes(12), text, None))


def unseal(key: bytes, sealed: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return bytes(ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None))
    except InvalidTag:
        raise HardyError("an encrypted share was changed on its way.") from None


def pair_mask(me: int, other: int, mine: KeyPair, public: bytes, attempt: str, size: int) -> Whole:
    """What I add for another client; it adds minus this."""
    made = keystream(mine.agree(public, "mask", attempt, *sorted((me, other))), size)
    return made if me < other else np.negative(made)


def mask(values: Whole, me: int, mine: KeyPair, own: bytes, others: Mapping[int, bytes], attempt: str) -> Whole:
    """A vector with all masks: `others` are the public keys of the clients that shared theirs."""
    total = values + keystream(own, len(values))
    for other, public in others.items():
        if other != me:
            total = total + pair_mask(me, other, mine, public, attempt, len(values))
    return total


def enough(clients: int) -> int:
    """How many of so many clients must stay to the end: more than two thirds, so that a server that lies about who was
    lost cannot learn both secrets of one."""
    return 2 * clients // 3 + 1


def unmask(
    vectors: Iterable[Whole],
    size: int,
    *,
    own: Sequence[bytes],
    lost: Mapping[int, bytes],
    stayed: Mapping[int, bytes],
    attempt: str,
) -> Whole:
    """The sum of masked vectors without their masks: `own` are the secrets of the streams of those that stayed, `lost`
    the private keys of those that shared keys and sent nothing, `stayed` the public keys of those that did."""
    total = np.zeros(size, np.uint64)
    for vector in vectors:
        total = total + vector
    for secret in own:
        total = total - keystream(secret, size)
    for other, private in lost.items():
        pair = KeyPair.of(private)
        for client, public in stayed.items():  # the lost one would have added the negative of what the client added
            total = total + pair_mask(other, client, pair, public, attempt, size)
    return total
