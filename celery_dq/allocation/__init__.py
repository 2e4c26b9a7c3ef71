"""Allocation: which worker serves which partitions.

``assignment``  the whole assignment, computed afresh by a consistent-hash ring with bounded loads; pure
``members``     the workers that run, as ephemeral nodes in ZooKeeper
``published``   the published assignment: compressed lists of one generation, and its flip
``rebalancer``  the elected allocator, which computes and publishes
``follower``    one worker as a member: registers, and follows the published assignment

``celery_dq.worker.allocation`` makes the follower and the rebalancer in a worker. The transport asks the
follower through the protocol ``PartitionAllocation`` in ``celery_dq.protocols``, and does not import this
package.
"""
