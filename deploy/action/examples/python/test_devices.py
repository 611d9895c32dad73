"""A memory region of every RDMA device, by pyverbs."""

import unittest

import pyverbs.device
from pyverbs.mr import MR
from pyverbs.pd import PD
import pyverbs.enums as enums


class Devices(unittest.TestCase):
    def test_memory_is_registered(self):
        devices = pyverbs.device.get_device_list()
        self.assertTrue(devices, "no RDMA device")
        for device in devices:
            name = device.name.decode()
            with self.subTest(device=name):
                with pyverbs.device.Context(name=name) as context, PD(context) as pd:
                    with MR(pd, 4096, enums.IBV_ACCESS_LOCAL_WRITE) as region:
                        region.write("hello", 5)
                        self.assertEqual(region.read(5, 0), b"hello")


if __name__ == "__main__":
    unittest.main()
