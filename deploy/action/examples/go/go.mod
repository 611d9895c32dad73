module example.com/rdma

go 1.19
