"""Why an etcd cluster does not answer: what listens where its members should be."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from contextlib import suppress

from reft.errors import ConfigError
from reft.store.door import parse_endpoint
from reft.store.etcd.line import EtcdLine
from reft.store.etcd.settings import EtcdSettings

_PROBE_SECS = 2.0


def findings(line: EtcdLine) -> list[str]:
    """What is the matter with each member, in words.

    Raises:
        ConfigError: waiting would not help: something else listens, or TLS is set up otherwise.
    """
    found = []
    for endpoint in line.settings.endpoints:
        has_leader = line.leader_known_by(endpoint, _PROBE_SECS)
        if has_leader is None:
            found.append(f"{endpoint} {_what_listens(endpoint, line.settings)}")
        elif has_leader:
            found.append(f"{endpoint} answers")
        else:
            found.append(f"{endpoint} has no leader: most members of the cluster are down or cut off")
    return found


def _what_listens(endpoint: str, settings: EtcdSettings) -> str:
    address = parse_endpoint(endpoint)
    try:
        socket.create_connection(address, timeout=_PROBE_SECS).close()
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"
    if settings.tls:
        return _over_tls(endpoint, settings)
    if _is_etcd(http.client.HTTPConnection(*address, timeout=_PROBE_SECS)):
        return "answers, but not in time"
    if _speaks_tls(address):
        raise ConfigError(
            f"{endpoint} speaks TLS: write --rdzv-conf cacert=FILE (and cert=FILE,key=FILE where etcd asks "
            f"for a client's certificate), or set REFT_ETCD_CACERT (REFT_ETCD_CERT, REFT_ETCD_KEY)"
        )
    return _not_etcd(endpoint)


def _over_tls(endpoint: str, settings: EtcdSettings) -> str:
    host, port = parse_endpoint(endpoint)
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert and str(settings.ca_cert))
        if settings.cert is not None:
            context.load_cert_chain(settings.cert, settings.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"etcd's certificates cannot be used: {error}; check cacert, cert and key"
        ) from error
    try:
        if _is_etcd(http.client.HTTPSConnection(host, port, timeout=_PROBE_SECS, context=context)):
            return "answers, but not in time"
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate of {endpoint} is not to be trusted: {error.verify_message}. Give the file that "
            f"signs it as --rdzv-conf cacert=FILE, and the member under a name that is in the certificate"
        ) from error
    except ssl.SSLError as error:
        if "certificate" in str(error).lower() or "CERTIFICATE" in str(error.reason or ""):
            raise ConfigError(
                f"{endpoint} asks for a client's certificate that it trusts ({error.reason}): --rdzv-conf "
                f"cert=FILE,key=FILE, or REFT_ETCD_CERT and REFT_ETCD_KEY"
            ) from error
        raise ConfigError(
            f"{endpoint} does not speak TLS ({error.reason}): leave out cacert, cert, key and https://, or "
            f"check --rdzv-endpoint"
        ) from error
    return _not_etcd(endpoint)


def _is_etcd(connection: http.client.HTTPConnection) -> bool:
    """Whether it tells etcd's version; raises ssl.SSLError where that is the trouble."""
    try:
        connection.request("GET", "/version")
        return "etcdserver" in json.loads(connection.getresponse().read(4096))
    except TimeoutError:
        return True  # something that stands still; it may be one
    except ssl.SSLError:
        raise
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return False
    finally:
        connection.close()


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        suppress(OSError),
        socket.create_connection(address, timeout=_PROBE_SECS) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


def _not_etcd(endpoint: str) -> str:
    raise ConfigError(
        f"what listens at {endpoint} is no etcd: check --rdzv-endpoint (etcd's client port is 2379), or "
        f"leave out --rdzv-backend for a `reft rendezvous`"
    )
