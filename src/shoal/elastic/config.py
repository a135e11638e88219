"""What an election by etcd needs: the part of a recipe's ``[elastic]`` section that is about many machines."""

from shoal.core.config import Config


class ElectionConfig(Config):
    """How a candidate is let in by etcd."""

    etcd_ca: str | None = None
    """File with the certificates that an election by etcd over https trusts; left out, those of the system."""
    etcd_cert: str | None = None
    """File with this process's certificate, where etcd asks for one; with etcd_key."""
    etcd_key: str | None = None
    """File with the key of etcd_cert, readable by its owner only."""
    etcd_login: str | None = None
    """File with one line USER:PASSWORD for etcd, readable by its owner only."""
