/* An allocator that reads a file with its lock held when it starts, as jemalloc does. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void *__libc_malloc(size_t size);

static int is_started, is_locked;

static void look_at_files(void)
{
	char text[16];
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	struct pollfd polled = { .fd = fd, .events = POLLIN };

	if (fd >= 0 && poll(&polled, 1, 0) >= 0 && read(fd, text, sizeof text) >= 0)
		close(fd);
}

void *malloc(size_t size)
{
	static const char message[] = "malloc was called by a call that malloc made\n";

	if (is_locked) {
		if (write(2, message, sizeof message - 1))
			_exit(1);
		_exit(2);
	}
	if (!is_started) {
		is_started = is_locked = 1;
		look_at_files();
		is_locked = 0;
	}
	return __libc_malloc(size);
}

int main(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	char *text = strdup("done");

	if (fd >= 0 && text)
		puts(text);
	return close(fd);
}
