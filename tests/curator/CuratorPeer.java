import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.queue.DistributedDelayQueue;
import org.apache.curator.framework.recipes.queue.DistributedIdQueue;
import org.apache.curator.framework.recipes.queue.DistributedPriorityQueue;
import org.apache.curator.framework.recipes.queue.DistributedQueue;
import org.apache.curator.framework.recipes.queue.MultiItem;
import org.apache.curator.framework.recipes.queue.QueueBase;
import org.apache.curator.framework.recipes.queue.QueueBuilder;
import org.apache.curator.framework.recipes.queue.QueueConsumer;
import org.apache.curator.framework.recipes.queue.QueueSerializer;
import org.apache.curator.framework.recipes.queue.SimpleDistributedQueue;
import org.apache.curator.framework.state.ConnectionState;
import org.apache.curator.retry.RetryOneTime;

/**
 * A Java program with Curator queues. It reads one command per line and answers with one line.
 *
 * <p>put KIND PATH ARGUMENT ITEM... — take KIND PATH LOCKPATH|- COUNT — fail KIND PATH LOCKPATH — remove PATH ID
 */
public class CuratorPeer {
    static CuratorFramework client;

    static class Text implements QueueSerializer<String> {
        @Override
        public byte[] serialize(String item) {
            return item.getBytes(StandardCharsets.UTF_8);
        }

        @Override
        public String deserialize(byte[] bytes) {
            return new String(bytes, StandardCharsets.UTF_8);
        }
    }

    static class Seen implements QueueConsumer<String> {
        final BlockingQueue<String> items = new LinkedBlockingQueue<>();

        @Override
        public void consumeMessage(String message) {
            items.add(message);
        }

        @Override
        public void stateChanged(CuratorFramework client, ConnectionState state) {}
    }

    /** A consumer that fails; its second call shows that the item was requeued. */
    static class Failing implements QueueConsumer<String> {
        final CountDownLatch failed = new CountDownLatch(2);
        final CountDownLatch closed = new CountDownLatch(1);

        @Override
        public void consumeMessage(String message) throws Exception {
            failed.countDown();
            if (failed.getCount() == 0) {
                closed.await();
            }
            throw new IllegalStateException(message);
        }

        @Override
        public void stateChanged(CuratorFramework client, ConnectionState state) {}
    }

    public static void main(String[] arguments) throws Exception {
        client = CuratorFrameworkFactory.newClient(arguments[0], 10000, 10000, new RetryOneTime(100));
        client.start();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = new PrintStream(System.out, true, "UTF-8");
        out.println("ready");
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t");
            try {
                if (words[0].equals("put")) {
                    put(words);
                    out.println("ok");
                } else if (words[0].equals("take")) {
                    out.println(take(words[1], words[2], words[3], Integer.parseInt(words[4])));
                } else if (words[0].equals("fail")) {
                    fail(words[1], words[2], words[3]);
                    out.println("ok");
                } else {
                    DistributedIdQueue<String> queue =
                            QueueBuilder.builder(client, null, new Text(), words[1]).buildIdQueue();
                    queue.start();
                    out.println(queue.remove(words[2]));
                    queue.close();
                }
            } catch (Exception error) {
                out.println("error " + error);
            }
        }
    }

    static void put(String[] words) throws Exception {
        String kind = words[1];
        String path = words[2];
        String argument = words[3];
        List<String> items = List.of(words).subList(4, words.length);
        if (kind.equals("simple")) {
            SimpleDistributedQueue queue = new SimpleDistributedQueue(client, path);
            for (String item : items) {
                queue.offer(item.getBytes(StandardCharsets.UTF_8));
            }
            return;
        }
        QueueBuilder<String> builder =
                QueueBuilder.builder(client, (QueueConsumer<String>) null, new Text(), path).putInBackground(false);
        try (QueueBase<String> queue = build(builder, kind)) {
            queue.start();
            if (kind.equals("multi")) {
                java.util.Iterator<String> each = items.iterator();
                ((DistributedQueue<String>) queue).putMulti(() -> each.hasNext() ? each.next() : null);
                return;
            }
            for (String item : items) {
                switch (kind) {
                    case "plain":
                        ((DistributedQueue<String>) queue).put(item);
                        break;
                    case "id":
                        ((DistributedIdQueue<String>) queue).put(item, argument);
                        break;
                    case "priority":
                        ((DistributedPriorityQueue<String>) queue).put(item, Integer.parseInt(argument));
                        break;
                    default:
                        ((DistributedDelayQueue<String>) queue).put(item, Long.parseLong(argument));
                }
            }
        }
    }

    static String take(String kind, String path, String lockPath, int count) throws Exception {
        StringBuilder taken = new StringBuilder();
        if (kind.equals("simple")) {
            SimpleDistributedQueue queue = new SimpleDistributedQueue(client, path);
            for (int number = 0; number < count; number++) {
                byte[] data = queue.poll(20, TimeUnit.SECONDS);
                taken.append(number == 0 ? "" : "\t").append(data == null ? "nothing" : new Text().deserialize(data));
            }
            return taken.toString();
        }
        Seen seen = new Seen();
        QueueBuilder<String> builder = QueueBuilder.builder(client, seen, new Text(), path);
        if (!lockPath.equals("-")) {
            builder = builder.lockPath(lockPath);
        }
        try (QueueBase<String> queue = build(builder, kind)) {
            queue.start();
            for (int number = 0; number < count; number++) {
                String item = seen.items.poll(20, TimeUnit.SECONDS);
                taken.append(number == 0 ? "" : "\t").append(item == null ? "nothing" : item);
            }
        }
        return taken.toString();
    }

    static void fail(String kind, String path, String lockPath) throws Exception {
        Failing failing = new Failing();
        QueueBuilder<String> builder = QueueBuilder.builder(client, failing, new Text(), path).lockPath(lockPath);
        try (QueueBase<String> queue = build(builder, kind)) {
            queue.start();
            failing.failed.await();
        } finally {
            failing.closed.countDown();
        }
    }

    static QueueBase<String> build(QueueBuilder<String> builder, String kind) {
        switch (kind) {
            case "id":
                return builder.buildIdQueue();
            case "priority":
                return builder.buildPriorityQueue(0);
            case "delay":
                return builder.buildDelayQueue();
            default:
                return builder.buildQueue();
        }
    }
}
