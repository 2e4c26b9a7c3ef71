"""Allocation: which worker serves which partitions.

``assignment``  the whole assignment, computed afresh by a consistent-hash ring with bounded loads; pure
``nodes``       the nodes in ZooKeeper: the workers that run, the published assignment and its flip
``rebalancer``  the elected allocator, which computes and publishes
``follower``    one worker as a member: registers, and follows the published assignment

``celery_dq.worker.allocation`` makes the follower and the rebalancer in a worker. The transport asks the
follower through the protocol ``PartitionAllocation`` in ``celery_dq.protocols``, and does not import this
package.
"""
